// Command scanner runs on the hand-held devices: it queues scans and sends them when the network is there.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io/ioutil"
	"log"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

type Scan struct {
	Barcode  string
	Quantity int
	Site     string
	At       time.Time
}

type Queue struct {
	mu    sync.Mutex
	scans []Scan
	path  string
}

func OpenQueue(path string) (*Queue, error) {
	q := &Queue{path: path}
	data, err := ioutil.ReadFile(path)
	if err != nil {
		return q, nil
	}
	err = json.Unmarshal(data, &q.scans)
	return q, err
}

func (q *Queue) Push(s Scan) {
	q.mu.Lock()
	q.scans = append(q.scans, s)
	q.save()
	q.mu.Unlock()
}

// Take returns up to n scans and forgets them.
func (q *Queue) Take(n int) []Scan {
	if len(q.scans) < n {
		n = len(q.scans)
	}
	taken := q.scans[:n]
	q.scans = q.scans[n:]
	q.save()
	return taken
}

func (q *Queue) save() {
	data, _ := json.Marshal(q.scans)
	ioutil.WriteFile(q.path, data, 0777)
}

type Sender struct {
	URL    string
	Token  string
	Queue  *Queue
	Client *http.Client
	Errors int
}

func (s *Sender) sendOne(scan Scan) error {
	body, err := json.Marshal(scan)
	if err != nil {
		return err
	}
	request, err := http.NewRequest("POST", s.URL+"/scans", bytes.NewReader(body))
	request.Header.Set("Authorization", "Bearer "+s.Token)
	response, err := s.Client.Do(request)
	if err != nil {
		s.Errors++
		return err
	}
	if response.StatusCode != 201 {
		return fmt.Errorf("server answered %s", response.Status)
	}
	return nil
}

func (s *Sender) Loop() {
	for {
		batch := s.Queue.Take(32)
		var wait sync.WaitGroup
		for _, scan := range batch {
			go func() {
				wait.Add(1)
				defer wait.Done()
				if err := s.sendOne(scan); err != nil {
					log.Printf("sending %v: %v", scan, err)
					s.Queue.Push(scan)
				}
			}()
		}
		wait.Wait()
		if len(batch) == 0 {
			time.Sleep(1 * time.Second)
		}
	}
}

// parse reads "BARCODE" or "BARCODE*QUANTITY", as the device types it.
func parse(line, site string) (Scan, error) {
	parts := strings.Split(strings.TrimSpace(line), "*")
	scan := Scan{Barcode: parts[0], Quantity: 1, Site: site, At: time.Now()}
	if len(parts) > 1 {
		scan.Quantity, _ = strconv.Atoi(parts[1])
	}
	if len(scan.Barcode) < 8 {
		return scan, fmt.Errorf("barcode %q is too short", scan.Barcode)
	}
	return scan, nil
}

func main() {
	url := flag.String("url", "http://inventory.local:8080", "inventory service")
	token := flag.String("token", "", "API token")
	site := flag.String("site", "berlin", "where this device is")
	path := flag.String("queue", "/var/lib/scanner/queue.json", "where scans wait")
	flag.Parse()

	queue, err := OpenQueue(*path)
	if err != nil {
		log.Printf("starting with an empty queue: %v", err)
	}
	sender := &Sender{URL: *url, Token: *token, Queue: queue, Client: http.DefaultClient}
	go sender.Loop()

	scanner := bufio.NewScanner(os.Stdin)
	for scanner.Scan() {
		scan, err := parse(scanner.Text(), *site)
		if err != nil {
			fmt.Println("?", err)
		}
		queue.Push(scan)
		fmt.Println("ok", scan.Barcode, scan.Quantity)
	}
}
